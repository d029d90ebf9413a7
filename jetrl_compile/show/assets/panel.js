"use strict";
// The panel: what is selected, differences, legend. Names are only ever set as text.
(() => {
  const J = window.jetrl;
  const { view, data } = J;
  const byId = (id) => document.getElementById(id);

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }
  J.make = make;

  function go(text, action) {
    const button = make("button", text, "go");
    button.type = "button";
    button.addEventListener("click", action);
    return button;
  }

  // Rows of attributes, a column for each graph; those that count as different are marked.
  function facts(sides, counts = () => false) {
    const table = make("table");
    if (J.pair) {
      const head = table.createTHead().insertRow();
      ["", ...view.titles].forEach((title) => head.append(make("th", title)));
    }
    const body = table.createTBody();
    const keys = [...new Set(sides.flatMap((side) => side.map(([key]) => key)))];
    for (const key of keys) {
      const values = sides.map((side) => (side.find(([name]) => name === key) ?? [key, ""])[1]);
      const row = body.insertRow();
      const differs = sides.every((side) => side.length) && new Set(values).size > 1 && counts(key);
      row.append(make("th", (differs ? "\u2260 " : "") + key));
      values.forEach((value) => row.append(make("td", value)));
      if (differs) row.className = "differs";
    }
    return table;
  }

  const isFound = (numbers, key) => numbers.some((n) => view.findings[n].label === key);

  function messages(numbers) {
    return numbers.map((n) => make("p", `\u2260 ${view.findings[n].message}`, "differs"));
  }

  function edgeName(edge) {
    return `${view.nodes[edge.source].name} \u2192 ${view.nodes[edge.target].name}.${edge.operand}`;
  }

  function edgePart(number) {
    const edge = view.edges[number];
    const box = make("div");
    box.append(make("p", edgeName(edge), "name"), ...messages(edge.found));
    const sides = edge.flows.map((flow) => (flow === null ? [] : view.flows[flow].facts));
    box.append(facts(sides, (key) => key !== data.saved_label || isFound(edge.found, key)));
    const size = edge.size === null ? "its size does not follow from the graph"
      : `${J.bytes(edge.size)} at ${view.tokens.toLocaleString("en")} tokens`;
    box.append(make("p", size));
    box.append(go("where it comes from", () => J.jump({ node: edge.source })),
      make("span", "  "), go("where it is read", () => J.jump({ node: edge.target })));
    return box;
  }

  function edgeList(title, numbers) {
    const box = make("div");
    if (!numbers.length) return box;
    box.append(make("p", title));
    const list = make("ul");
    for (const number of numbers) {
      const edge = view.edges[number];
      const item = make("li");
      item.append(go(`${edgeName(edge)}  (${J.edgeText([number], null)})`, () => J.jump({ edge: number })));
      list.append(item);
    }
    box.append(list);
    return box;
  }

  function nodePart(number) {
    const node = view.nodes[number];
    const box = make("div");
    box.append(make("p", node.name, "name"));
    if (node.count > 1) box.append(make("p", `stands for ${node.count} equal operators`));
    box.append(...messages(node.found), facts(node.facts, (key) => isFound(node.found, key)));
    const into = [], out = [];
    view.edges.forEach((edge, n) => {
      if (edge.target === number) into.push(n);
      if (edge.source === number) out.push(n);
    });
    box.append(edgeList("reads", into), edgeList("is read by", out));
    return box;
  }

  function blockPart(number) {
    const block = view.blocks[number];
    const box = make("div");
    box.append(make("p", `${block.title} (${block.phase})`, "name"));
    if (block.repeats > 1) {
      const layers = block.drawn.map((n) => `${block.list_path}.${n}`).join(", ");
      box.append(make("p", `${block.repeats} times the same; drawn: ${layers}`));
    }
    const button = make("button", J.state.open.has(number) ? "Close" : "Open");
    button.type = "button";
    button.addEventListener("click", () => J.toggle(number));
    box.append(button);
    if (block.carried.length) {
      box.append(make("p", "hands from one repetition to the next:"));
      const list = make("ul");
      block.carried.forEach((line) => list.append(make("li", line)));
      box.append(list);
    }
    return box;
  }

  // Show what an element of the drawing is.
  J.describe = (item) => {
    const box = byId("details").querySelector("div");
    box.replaceChildren();
    if (!item) {
      box.append(make("p", "Click a block to open it, an edge or an operator for every attribute."));
      return;
    }
    if (item.source !== undefined) {
      if (item.members.length > 1) box.append(edgeList(`${item.members.length} tensors`, item.members));
      else box.append(edgePart(item.members[0]));
    } else if (item.type === "block") {
      box.append(blockPart(item.number));
    } else {
      box.append(nodePart(item.number));
    }
  };

  J.nameOf = (item) => {
    if (item.source !== undefined) {
      return item.members.length > 1 ? `${item.members.length} tensors`
        : edgeName(view.edges[item.members[0]]);
    }
    return item.type === "block" ? view.blocks[item.number].title : view.nodes[item.number].name;
  };

  function swatch(style, thick) {
    const ns = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(ns, "svg");
    svg.setAttribute("width", 64);
    svg.setAttribute("height", 14);
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(ns, "line");
    const dash = { dashed: "6 4", dotted: "2 3" }[style.line] ?? "none";
    const head = { triangle: "50,1 62,7 50,13", square: "50,2 60,2 60,12 50,12",
      diamond: "56,1 62,7 56,13 50,7", vee: "50,1 62,7 50,13 54,7" }[style.arrow];
    Object.entries({ x1: 0, y1: 7, x2: 52, y2: 7, stroke: style.color, "stroke-width": thick,
      "stroke-dasharray": dash }).forEach(([key, value]) => line.setAttribute(key, value));
    const arrow = document.createElementNS(ns, "polygon");
    arrow.setAttribute("points", head);
    arrow.setAttribute("fill", style.color);
    svg.append(line, arrow);
    return svg;
  }

  function legend() {
    const box = byId("legend").querySelector("div");
    const used = new Set(view.flows.map((flow) => flow.style));
    data.styles.forEach((style, n) => {
      if (!used.has(n) && n !== data.styles.length - 1) return;
      const row = make("div");
      row.append(swatch(style, 3), make("span", style.label));
      box.append(row);
    });
    if (J.pair) {
      const row = make("div", undefined, "differs");
      row.append(swatch({ color: data.colors.difference, line: "solid", arrow: "triangle" }, 5),
        make("span", "\u2260 a difference; dashed frame: in one graph only"));
      box.append(row);
    }
    [["Blue frame", "GEMM whose operands are FP8"], ["Thick black frame", "GEMM in high precision"],
      ["Cut corners", "folded layers, \u00d7 how often; a click opens them"],
      ["Thickness", `bytes at ${view.tokens.toLocaleString("en")} tokens, 1 pixel for each doubling; ` +
        "thinnest also where the size does not follow from the graph"],
      ["dgrad", "also stands for the rest of backward"],
    ].forEach(([key, text]) => box.append(make("div", `${key}: ${text}`)));
  }

  function differences() {
    const section = byId("differences");
    if (!J.pair) return;
    section.hidden = false;
    const total = view.findings.reduce((sum, found) => sum + found.count, 0);
    section.querySelector("h2").textContent = `Differences (${total})`;
    const list = section.querySelector("ol");
    // Findings of one cause follow each other: it is said once, above the first of them.
    view.findings.forEach((found, number) => {
      const item = make("li");
      if (!number || view.findings[number - 1].title !== found.title) {
        item.append(make("div", found.title, "title"));
        if (found.remedy) item.append(make("div", found.remedy));
      }
      item.append(go(found.place, () => J.jumpToFinding(number)));
      list.append(item);
    });
    if (!view.findings.length) list.replaceWith(make("p", "None."));
  }

  function about() {
    const box = byId("about").querySelector("div");
    const keys = [...new Set(view.meta.flatMap((meta) => Object.keys(meta)))];
    box.append(facts(view.meta.map((meta) => keys.filter((k) => k in meta).map((k) => [k, meta[k]]))));
  }

  function pictures() {
    if (!data.pictures.length) return;
    byId("pictures").hidden = false;
    for (const picture of data.pictures) {
      const figure = make("figure");
      const image = make("img");
      image.src = picture.data;
      image.alt = picture.caption;
      const button = make("button");
      button.type = "button";
      button.append(image);
      button.addEventListener("click", () => button.classList.toggle("large"));
      figure.append(button, make("figcaption", picture.caption));
      byId("pictures").querySelector("div").append(figure);
    }
  }

  // All of the header is made before the drawing measures where it is.
  for (const phase of data.all_phases) {
    const label = make("label");
    const box = make("input");
    box.type = "checkbox";
    box.value = phase;
    label.append(box, document.createTextNode(` ${phase}`));
    byId("phases").append(label);
  }
  byId("modes").hidden = !J.pair;
  byId("title").textContent = view.titles.join(" \u2194 ");
  if (view.verdict) {
    byId("verdict").hidden = false;
    byId("verdict").textContent = view.verdict;
  }
  legend();
  differences();
  about();
  pictures();
  J.describe(null);
})();
