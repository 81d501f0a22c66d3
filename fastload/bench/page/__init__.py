"""report.html: the JSON of a benchmark as one page that opens offline.

render.py  the page: its head, its warnings, its sections in order, and the provenance
panels.py  a section for each chart, with its text
charts.py  the charts, as SVG
tables.py  the tables: medians by row, and every run
markup.py  HTML and SVG from Python values, escaped
page.css   its style
"""
