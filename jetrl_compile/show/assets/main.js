"use strict";
// Clicks, keys, search, jumps and printing.
(() => {
  const J = window.jetrl;
  const { view, state, cy } = J;
  const byId = (id) => document.getElementById(id);
  const say = (text) => { byId("status").textContent = text; };
  let finding = -1;
  let toggled = 0; // when; a double click on a closed block is one click

  function redraw(keep) {
    const [zoom, pan] = [cy.zoom(), { ...cy.pan() }];
    const done = J.draw();
    if (done && keep) cy.viewport({ zoom, pan });
    else if (done) fit();
    if (state.selected) mark(state.selected);
    return done;
  }

  // Show a part (or all) at a size that can be read; what is too tall from its top on.
  function fit(part = cy.elements()) {
    const box = part.boundingBox();
    const [across, down] = [cy.width() - 40, cy.height() - 40];
    const zoom = Math.min(1.2, Math.max(0.5, Math.min(across / box.w, down / box.h)));
    const spare = Math.max(20, (cy.height() - box.h * zoom) / 2);
    cy.viewport({ zoom, pan: {
      x: cy.width() / 2 - ((box.x1 + box.x2) / 2) * zoom, y: spare - box.y1 * zoom } });
  }

  function elementsOf(id) {
    return cy.elements().filter((element) => element.data("item") === id);
  }

  function itemOf(id) {
    return J.seen.elements.get(id) ?? J.seen.edges.get(id);
  }

  function mark(id) {
    cy.elements(".chosen").removeClass("chosen");
    elementsOf(id).addClass("chosen");
  }

  function select(id, center) {
    const item = itemOf(id);
    if (!item) return;
    state.selected = id;
    mark(id);
    J.describe(item);
    byId("details").scrollIntoView({ block: "nearest" });
    say(`selected: ${J.nameOf(item)}`);
    if (center) {
      if (cy.zoom() < 0.6) cy.zoom(0.9);
      cy.center(elementsOf(id));
    }
  }
  J.select = select;

  J.toggle = (number) => {
    const opened = !state.open.has(number);
    toggled = performance.now();
    if (opened) state.open.add(number);
    else state.open.delete(number);
    if (!redraw(false)) {
      state.open.delete(number);
      J.draw(); // what was there before
      byId("message").hidden = false;
      return;
    }
    if (opened) fit(elementsOf(`b${number}`));
    select(`b${number}`, false);
    say(`${view.blocks[number].title} ${opened ? "opened" : "closed"}`);
  };

  // Make a node or an edge visible, select it and go there.
  J.jump = (target) => {
    const ends = target.node !== undefined ? [target.node]
      : [view.edges[target.edge].source, view.edges[target.edge].target];
    for (const number of ends) {
      const node = view.nodes[number];
      state.phases.add(node.phase);
      if (node.role === "weight") state.weights = true;
      if (node.role === "integer") state.integers = true;
      J.chains[number].forEach((block) => state.open.add(block));
    }
    if (target.edge !== undefined && J.isSaved(view.edges[target.edge])) state.saved = true;
    controls();
    if (!redraw(false)) return;
    select(target.node !== undefined ? `n${target.node}` : `e${target.edge}`, true);
  };

  J.jumpToFinding = (number) => {
    finding = number;
    const { nodes, edges } = view.findings[number];
    if (edges.length) J.jump({ edge: edges[0] });
    else if (nodes.length) J.jump({ node: nodes[0] });
    else say("this difference is of nothing that is drawn");
  };

  // Search --------------------------------------------------------------------------

  // A layer that was folded away is found as the one that stands for it.
  function folded(text) {
    for (const block of view.blocks) {
      if (block.drawn.length === block.numbers.length) continue;
      const last = block.list_path.split(".").pop();
      const escaped = last.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
      const found = new RegExp(`(^|\\.)${escaped}\\.(\\d+)(?=\\D|$)`, "i").exec(text);
      if (!found || !block.numbers.includes(Number(found[2]))) continue;
      const place = block.numbers.indexOf(Number(found[2])) % block.drawn.length;
      const start = found.index + found[1].length;
      return text.slice(0, start) + `${last}.${block.drawn[place]}` + text.slice(found.index + found[0].length);
    }
    return text;
  }

  function search(text) {
    const words = text.trim();
    if (!words) return [];
    const wanted = [words.toLowerCase(), folded(words).toLowerCase()];
    const found = [];
    view.nodes.forEach((node, number) => {
      const name = node.name.toLowerCase();
      if (wanted.some((part) => name.includes(part))) found.push(number);
    });
    return found;
  }
  J.search = search;

  function results() {
    const list = byId("results");
    const found = search(byId("search").value);
    list.replaceChildren();
    list.hidden = !byId("search").value.trim();
    for (const number of found.slice(0, 50)) {
      const node = view.nodes[number];
      const item = J.make("li");
      const button = J.make("button", node.name + (node.count > 1 ? `  (\u00d7${node.count})` : ""));
      button.type = "button";
      button.addEventListener("click", () => { J.jump({ node: number }); list.hidden = true; });
      item.append(button);
      list.append(item);
    }
    if (!found.length) list.append(J.make("li", "nothing has such a name"));
    if (found.length > 50) list.append(J.make("li", `and ${found.length - 50} more`));
    say(`${found.length} found`);
    return found;
  }

  // Controls ------------------------------------------------------------------------

  function controls() {
    byId("weights").checked = state.weights;
    byId("saved").checked = state.saved;
    byId("integers").checked = state.integers;
    document.querySelectorAll("#phases input").forEach((box) => {
      box.checked = state.phases.has(box.value);
    });
  }

  document.querySelectorAll("#phases input").forEach((box) => {
    box.addEventListener("change", () => {
      if (box.checked) state.phases.add(box.value);
      else state.phases.delete(box.value);
      redraw(false);
    });
  });
  for (const key of ["weights", "saved", "integers"]) {
    byId(key).addEventListener("change", (event) => {
      state[key] = event.target.checked;
      redraw(false);
    });
  }
  document.querySelectorAll("#modes input").forEach((box) => {
    box.addEventListener("change", () => { state.mode = box.value; redraw(false); });
  });
  byId("search").addEventListener("input", results);
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape") { byId("search").value = ""; results(); byId("graph").focus(); }
    if (event.key !== "Enter") return;
    const found = results();
    if (!found.length) return;
    J.jump({ node: found[0] });
    byId("results").hidden = true;
  });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("open-all").addEventListener("click", () => {
    const before = [...state.open];
    view.blocks.forEach((_, number) => state.open.add(number));
    if (redraw(false)) return;
    state.open = new Set(before);
    J.draw();
    byId("message").hidden = false;
  });
  byId("close-all").addEventListener("click", () => { state.open.clear(); redraw(false); });
  const zoom = (factor) => cy.zoom({
    level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  byId("zoom-in").addEventListener("click", () => zoom(1.3));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.3));
  byId("fit").addEventListener("click", () => cy.fit(undefined, 20));

  // Mouse ---------------------------------------------------------------------------

  cy.on("tap", "node, edge", (event) => {
    const item = itemOf(event.target.data("item"));
    if (!item) return;
    if (item.type === "block" && !item.open) J.toggle(item.number);
    else select(item.id, false);
  });
  cy.on("dbltap", "node", (event) => {
    const item = itemOf(event.target.data("item"));
    const again = performance.now() - toggled < 600;
    if (item && item.type === "block" && item.open && !again) J.toggle(item.number);
  });

  // Keys ----------------------------------------------------------------------------

  function neighbour(key) {
    const current = state.selected && elementsOf(state.selected)[0];
    if (!current || current.isEdge()) {
      const end = current && (key === "ArrowUp" ? current.source() : current.target());
      return end ? end.data("item") : [...J.seen.elements.values()].find((x) => !x.open)?.id;
    }
    if (key === "ArrowDown") return current.outgoers("node")[0]?.data("item");
    if (key === "ArrowUp") return current.incomers("node")[0]?.data("item");
    const here = current.position();
    const sign = key === "ArrowRight" ? 1 : -1;
    return cy.nodes().filter((node) => !node.hasClass("open") && (node.position().x - here.x) * sign > 1)
      .min((node) => Math.abs(node.position().x - here.x) + 4 * Math.abs(node.position().y - here.y))
      .ele?.data("item");
  }

  function nextEdge() {
    const around = state.selected && elementsOf(state.selected)[0];
    if (!around) return undefined;
    const edge = around.isEdge();
    const list = edge ? state.around : around.connectedEdges().map((x) => x.data("item"));
    if (!edge) state.around = list;
    return list && list[(list.indexOf(state.selected) + 1) % list.length];
  }

  const keys = {
    "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: () => cy.fit(undefined, 20),
    "/": () => byId("search").focus(),
    Enter: () => {
      const item = state.selected && itemOf(state.selected);
      if (item && item.type === "block") J.toggle(item.number);
      else byId("details").focus();
    },
    e: () => select(nextEdge(), true),
    n: () => { if (view.findings.length) J.jumpToFinding((finding + 1) % view.findings.length); },
    p: () => {
      const count = view.findings.length;
      if (count) J.jumpToFinding((Math.max(finding, 0) - 1 + count) % count);
    },
  };
  byId("graph").addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = event.key.startsWith("Arrow");
    const action = arrow ? () => select(neighbour(event.key), true) : keys[event.key] ?? keys[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  });

  // A canvas prints as it is on the screen; a picture of the whole graph prints well.
  window.addEventListener("beforeprint", () => {
    byId("printed").src = cy.png({ full: true, scale: 2, bg: "#fff", maxWidth: 8000, maxHeight: 8000 });
  });

  controls();
  redraw(false);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
