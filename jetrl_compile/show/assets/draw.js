"use strict";
// Layered layout by dagre, drawing by cytoscape. Only what is visible is laid out.
(() => {
  const J = window.jetrl;
  const { view, state, data } = J;
  const FONT = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  const GAP = 120; // between two graphs side by side
  const pen = document.createElement("canvas").getContext("2d");

  function width(text, font = FONT) {
    pen.font = font;
    return pen.measureText(text).width;
  }

  function size(lines) {
    return {
      width: Math.max(...lines.map((line) => width(line))) + 24,
      height: lines.length * 16 + 14,
    };
  }

  // Edges over many layers cost a place in each. Beyond a budget the longest ones are
  // drawn straight, behind the boxes, and take no part in the layout.
  function routed(elements, edges) {
    const order = new Map([...elements.keys()].map((id, place) => [id, place]));
    const into = new Map([...elements.keys()].map((id) => [id, []]));
    for (const edge of edges.values()) {
      if (order.get(edge.source) < order.get(edge.target)) into.get(edge.target).push(edge.source);
    }
    const rank = new Map();
    for (const id of elements.keys()) {
      rank.set(id, Math.max(0, ...into.get(id).map((source) => rank.get(source) + 1)));
    }
    const span = (edge) => Math.abs(rank.get(edge.target) - rank.get(edge.source));
    const sorted = [...edges.values()].sort((a, b) => span(a) - span(b));
    const kept = new Set();
    let places = 0;
    for (const edge of sorted) {
      places += Math.max(0, span(edge) - 1);
      if (places > data.most_places) break;
      kept.add(edge.id);
    }
    return kept;
  }

  function layout(elements, edges) {
    const graph = new dagre.graphlib.Graph({ compound: true, multigraph: true });
    graph.setGraph({
      rankdir: "TB", nodesep: 34, ranksep: 26, edgesep: 16, marginx: 20, marginy: 20,
      // Its default gives shorter edges, but takes six times as long for many boxes.
      ranker: elements.size > data.most / 2 ? "tight-tree" : "network-simplex",
    });
    for (const item of elements.values()) {
      graph.setNode(item.id, item.open ? {} : { ...item.size });
    }
    for (const item of elements.values()) {
      if (item.parent !== null) graph.setParent(item.id, item.parent);
    }
    const kept = routed(elements, edges);
    for (const edge of edges.values()) {
      if (!kept.has(edge.id)) continue;
      const label = { width: width(edge.text, FONT) * 0.9 + 8, height: 14, labelpos: "c" };
      graph.setEdge(edge.source, edge.target, label, edge.id);
    }
    dagre.layout(graph);
    for (const item of elements.values()) Object.assign(item, { at: graph.node(item.id) });
    for (const edge of edges.values()) {
      const name = { v: edge.source, w: edge.target, name: edge.id };
      edge.points = kept.has(edge.id) ? graph.edge(name).points : null;
    }
    return graph.graph().width;
  }

  // Cytoscape wants bends relative to the line between the centres.
  function bends(edge, from, to) {
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const long = dx * dx + dy * dy;
    const inner = edge.points ? edge.points.slice(1, -1) : [];
    if (!long || !inner.length) return null;
    const weights = inner.map((p) => ((p.x - from.x) * dx + (p.y - from.y) * dy) / long);
    const distances = inner.map(
      (p) => ((p.y - from.y) * dx - (p.x - from.x) * dy) / Math.sqrt(long));
    return { weights, distances };
  }

  function styleOf(members, side) {
    const found = new Set();
    for (const number of members) {
      view.edges[number].flows.forEach((flow, bit) => {
        if (flow !== null && (side === null || side === bit)) found.add(view.flows[flow].style);
      });
    }
    return data.styles[found.size === 1 ? [...found][0] : data.styles.length - 1];
  }

  const largest = Math.max(1, ...view.edges
    .filter((edge) => view.nodes[edge.source].role !== "weight").map((edge) => edge.size ?? 0));
  J.thickness = (count) => (count === null ? 1
    : Math.min(data.widest, Math.max(1, data.widest + Math.log2(count / largest))));

  // Of its nodes, and of edges that are not drawn: in a closed block, from weights.
  function hasFindings(item) {
    if (item.members.some((number) => view.nodes[number].found.length)) return true;
    const inside = new Set(item.members);
    return view.edges.some((edge) => edge.found.length && inside.has(edge.target)
      && (item.type === "block" || (view.nodes[edge.source].role === "weight" && !state.weights)));
  }

  function drawn(seen, side, shift, total) {
    const prefix = side === null ? "" : `${side}:`;
    const bit = side === null ? 3 : 1 << side;
    const result = [];
    for (const item of seen.elements.values()) {
      if (!(item.sides & bit)) continue;
      const one = J.pair && item.sides !== J.both;
      const node = item.type === "node" ? view.nodes[item.number] : null;
      const fp8 = node ? node.fp8.filter((flag, n) => flag !== null && (side === null || n === side)) : [];
      const differs = !item.open && hasFindings(item);
      const lines = node ? J.nodeLines(node, side) : J.blockLines(view.blocks[item.number], item.members, side);
      const classes = [item.type];
      if (item.open) classes.push("open");
      if (one) classes.push("one");
      if (differs) classes.push("differs");
      if (fp8.length) classes.push(fp8.every(Boolean) ? "fp8" : "high");
      if (node && ["input", "output", "parameter", "constant"].includes(node.kind)) classes.push("end");
      const label = (differs ? "\u2260 " : "") + (item.open ? lines[0] : lines.join("\n"));
      result.push({
        group: "nodes",
        data: {
          id: prefix + item.id, item: item.id, label,
          w: item.open ? item.at.width : item.size.width,
          h: item.open ? item.at.height : item.size.height,
          depth: item.depth,
        },
        position: { x: item.at.x + shift, y: item.at.y },
        classes: classes.join(" "),
      });
    }
    for (const edge of seen.edges.values()) {
      if (!(edge.sides & bit)) continue;
      const [from, to] = [seen.elements.get(edge.source).at, seen.elements.get(edge.target).at];
      const bend = bends(edge, from, to);
      const style = styleOf(edge.members, side);
      const sizes = edge.members.map((number) => view.edges[number].size);
      const known = sizes.filter((count) => count !== null);
      const differs = edge.members.some(
        (number) => view.edges[number].found.length || J.flowsDiffer(view.edges[number]));
      const classes = [differs ? "differs" : "", bend ? "bent" : "", edge.points ? "" : "long",
        J.pair && edge.sides !== J.both ? "one" : ""];
      result.push({
        group: "edges",
        data: {
          id: prefix + edge.id, item: edge.id, source: prefix + edge.source,
          target: prefix + edge.target,
          label: (differs ? "\u2260 " : "") + J.edgeText(edge.members, side),
          color: style.color, line: style.line, arrow: style.arrow,
          thick: J.thickness(known.length ? known.reduce((a, b) => a + b) : null),
          weights: bend ? bend.weights : [0.5], distances: bend ? bend.distances : [0],
        },
        classes: classes.join(" "),
      });
    }
    if (side !== null) {
      result.push({
        group: "nodes", data: { id: `${prefix}title`, label: view.titles[side] }, classes: "heading",
        position: { x: shift + total / 2, y: -30 },
      });
    }
    return result;
  }

  J.seen = { elements: new Map(), edges: new Map() };
  J.cy = cytoscape({
    container: document.getElementById("graph"),
    minZoom: 0.02, maxZoom: 4, boxSelectionEnabled: false,
    autoungrabify: true, selectionType: "single",
    layout: { name: "preset" },
    style: J.sheet,
  });

  // Draw what the state says. Returns whether it was drawn; if not, the page says why.
  J.draw = () => {
    const seen = J.visible();
    const message = document.getElementById("message");
    message.hidden = seen.elements.size <= data.most;
    if (!message.hidden) {
      message.textContent = `This would draw ${seen.elements.size} boxes at once; ` +
        `${data.most} can be read and laid out. Close blocks, switch phases off, or make a ` +
        "page of a part: jetrl show GRAPH.json --module MODULE.PATH -o part.html";
      return false;
    }
    for (const item of seen.elements.values()) {
      const lines = item.type === "node" ? J.nodeLines(view.nodes[item.number], null)
        : J.blockLines(view.blocks[item.number], item.members, null);
      item.depth = item.parent === null ? 0 : seen.elements.get(item.parent).depth + 1;
      item.size = size([`\u2260 ${lines[0]}`, ...lines.slice(1)]);
    }
    for (const edge of seen.edges.values()) edge.text = `\u2260 ${J.edgeText(edge.members, null)}`;
    const total = layout(seen.elements, seen.edges);
    const parts = state.mode === "side" && J.pair
      ? [...drawn(seen, 0, 0, total), ...drawn(seen, 1, total + GAP, total)]
      : drawn(seen, null, 0, total);
    J.cy.batch(() => { J.cy.elements().remove(); J.cy.add(parts); });
    J.seen = seen;
    return true;
  };
})();
