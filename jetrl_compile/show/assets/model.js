"use strict";
// What is visible: nodes and blocks after folding, phases and switches.
// `jetrl_compile/show/visible.py` does the same for DOT and SVG.
window.jetrl = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const view = data.view;
  const pair = view.titles.length === 2;
  const both = pair ? 3 : 1;
  const state = {
    open: new Set(data.switches.opened ? view.blocks.keys() : []),
    phases: new Set(data.switches.phases),
    weights: data.switches.weights,
    saved: data.switches.saved,
    integers: data.switches.integers,
    mode: "overlay",
    selected: null,
  };

  // The blocks around a node, the outermost first.
  const chains = view.nodes.map((node) => {
    const chain = [];
    for (let b = node.block; b >= 0; b = view.blocks[b].parent) chain.unshift(b);
    return chain;
  });

  function shown(node) {
    if (!state.phases.has(node.phase)) return false;
    if (node.role === "integer") return state.integers;
    return node.role !== "weight" || state.weights;
  }

  // Whether an edge goes from forward to backward: they make the picture hard to read.
  function isSaved(edge) {
    const [source, target] = [view.nodes[edge.source], view.nodes[edge.target]];
    return source.role !== "weight" && source.phase === "forward" && target.phase !== "forward";
  }

  function visible() {
    const elements = new Map();
    const add = (id, type, number, parent) => {
      if (!elements.has(id)) {
        elements.set(id, { id, type, number, parent, members: [], sides: 0, open: false });
      }
      return elements.get(id);
    };
    const used = new Set();
    if (state.weights) {
      for (const edge of view.edges) {
        if (state.phases.has(view.nodes[edge.target].phase)) used.add(edge.source);
      }
    }
    const ids = view.nodes.map((node, number) => {
      if (!shown(node) || (node.role === "weight" && !used.has(number))) return null;
      let parent = null;
      for (const b of chains[number]) {
        const box = add(`b${b}`, "block", b, parent);
        box.sides |= node.sides;
        box.members.push(number);
        if (!state.open.has(b)) return box.id;
        box.open = true;
        parent = box.id;
      }
      const item = add(`n${number}`, "node", number, parent);
      item.sides = node.sides;
      item.members.push(number);
      return item.id;
    });
    const edges = new Map();
    view.edges.forEach((edge, number) => {
      const [source, target] = [ids[edge.source], ids[edge.target]];
      if (source === null || target === null || source === target) return;
      if (!state.saved && isSaved(edge)) return;
      const single = source[0] === "n" && target[0] === "n";
      const id = single ? `e${number}` : `${source}-${target}`;
      if (!edges.has(id)) edges.set(id, { id, source, target, members: [], sides: 0 });
      const item = edges.get(id);
      item.members.push(number);
      edge.flows.forEach((flow, bit) => { if (flow !== null) item.sides |= 1 << bit; });
    });
    return { elements, edges };
  }

  const findings = (numbers, list) =>
    [...new Set(numbers.flatMap((number) => list[number].found))].sort((a, b) => a - b);

  // Words ---------------------------------------------------------------------------

  function bytes(count) {
    if (count < 1000) return `${count} B`;
    const units = ["kB", "MB", "GB", "TB"];
    let unit = -1;
    do { count /= 1000; unit += 1; } while (count >= 1000 && unit < 3);
    return `${count.toFixed(1)} ${units[unit]}`;
  }

  function nodeLines(node, side) {
    const words = pair && side === null ? [...new Set(node.text.filter(Boolean))]
      : [node.text[side ?? 0]];
    const lines = [node.label];
    if (pair && side === null && words.length > 1) {
      node.text.forEach((text, n) => { if (text) lines.push(`${view.titles[n]}: ${text}`); });
    } else {
      lines.push(...words);
    }
    if (pair && node.sides !== both) lines.push(`only in ${view.titles[node.sides - 1]}`);
    return lines;
  }

  // How many GEMMs are FP8, for each graph or for one of them.
  function blockLines(block, members, side) {
    const times = block.repeats > 1 ? `   \u00d7${block.repeats}` : "";
    const counts = view.titles.map((title, n) => {
      let [all, fp8] = [0, 0];
      for (const number of members) {
        const node = view.nodes[number];
        if (node.fp8[n] === null) continue;
        all += node.count;
        if (node.fp8[n]) fp8 += node.count;
      }
      return all ? `${fp8} of ${all} GEMMs in FP8` : "";
    });
    const kept = side === null ? counts : [counts[side]];
    const words = [...new Set(kept)];
    const same = words.length === 1
      ? [block.phase + (words[0] ? `: ${words[0]}` : "")]
      : [block.phase, ...counts.map((text, n) => `${view.titles[n]}: ${text || "no GEMM"}`)];
    return [block.title + times, ...same];
  }

  // Whether both graphs have an edge and read it at another precision.
  function flowsDiffer(edge) {
    const texts = edge.flows.filter((f) => f !== null).map((f) => view.flows[f].text);
    return new Set(texts).size > 1;
  }

  function edgeText(members, side) {
    const words = new Map();
    for (const number of members) {
      const edge = view.edges[number];
      const flows = side === null ? edge.flows : [edge.flows[side]];
      const texts = [...new Set(flows.filter((f) => f !== null).map((f) => view.flows[f].text))];
      const text = texts.join(" \u2260 ");
      words.set(text, (words.get(text) ?? 0) + 1);
    }
    if (members.length === 1) {
      return `${view.edges[members[0]].operand}: ${[...words.keys()][0]}`;
    }
    const parts = [...words].map(([text, n]) => (n > 1 ? `${text} \u00d7${n}` : text));
    return parts.length > 2 ? `${parts.slice(0, 2).join(", ")}, \u2026` : parts.join(", ");
  }

  return {
    data, view, pair, both, state, chains, isSaved, visible, findings, flowsDiffer,
    bytes, nodeLines, blockLines, edgeText,
  };
})();
