"""Pictures of precision graphs: an HTML page, SVG, DOT, and plots of mismatches.

Graphs are paired (`paired`: one list of operators, with differences), repeated layers
become one block (`folding`), and what is drawn is data (`view`), from which the page
(`page`) and DOT and SVG (`graphviz`) are made.
"""
