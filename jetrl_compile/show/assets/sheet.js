"use strict";
// How cytoscape draws; dashes, shapes and words tell all that colours tell.
(() => {
  const { colors } = window.jetrl.data;
  const font = 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  window.jetrl.sheet = [
    { selector: "node", style: {
      shape: "round-rectangle", width: "data(w)", height: "data(h)", label: "data(label)",
      "text-wrap": "wrap", "text-max-width": 2000, "text-valign": "center", "font-size": 12,
      "line-height": 1.15, "font-family": font, color: "#1b1b1b", "background-color": "#fff",
      "border-width": 1, "border-color": "#555", "z-index-compare": "manual", "z-index": 50 } },
    { selector: "node.fp8", style: {
      "background-color": colors.fp8, "border-width": 2, "border-color": "#0072b2" } },
    { selector: "node.high", style: { "border-width": 3, "border-color": "#1b1b1b" } },
    { selector: "node.end", style: { shape: "ellipse", "background-color": "#f3f3f3" } },
    { selector: "node.block", style: {
      shape: "cut-rectangle", "background-color": colors.block, "border-width": 2,
      "border-color": "#7a6a3a" } },
    { selector: "node.open", style: {
      shape: "rectangle", "text-valign": "top", "text-margin-y": 18, "background-opacity": 0.6,
      "font-weight": "bold", "z-index": "data(depth)" } },
    { selector: "node.one", style: { "border-style": "dashed" } },
    { selector: "node.differs", style: {
      "border-color": colors.difference, "border-width": 5, "border-style": "double",
      color: colors.difference } },
    { selector: "node.heading", style: {
      "background-opacity": 0, "border-width": 0, "font-size": 20, "font-weight": "bold",
      width: 1, height: 1, events: "no" } },
    { selector: "edge", style: {
      "curve-style": "straight", width: "data(thick)", "line-color": "data(color)",
      "line-style": "data(line)", "line-dash-pattern": [9, 4], "target-arrow-shape": "data(arrow)",
      "target-arrow-color": "data(color)", "arrow-scale": 1, label: "data(label)",
      "font-size": 11, "font-family": font, color: "data(color)",
      "text-background-color": "#fff", "text-background-opacity": 0.85,
      "text-background-padding": 1, "z-index-compare": "manual", "z-index": 40 } },
    { selector: "edge.bent", style: {
      "curve-style": "round-segments", "segment-weights": "data(weights)",
      "segment-distances": "data(distances)", "edge-distances": "node-position",
      "segment-radii": 14 } },
    { selector: "edge.long", style: {
      "z-index": 20, "line-opacity": 0.35, "text-opacity": 0, "text-background-opacity": 0 } },
    { selector: "edge.one", style: { "line-opacity": 0.7 } },
    { selector: "edge.differs", style: {
      "line-color": colors.difference, "target-arrow-color": colors.difference,
      color: colors.difference, "font-weight": "bold",
      width: (edge) => edge.data("thick") + 3 } },
    { selector: "edge.chosen, node.chosen", style: { "underlay-color": "#ffb000", "underlay-opacity": 0.6, "underlay-padding": 7 } },
    { selector: "node.open.chosen", style: {
      "border-color": "#e69500", "border-width": 5, "underlay-opacity": 0 } },
  ];
})();
