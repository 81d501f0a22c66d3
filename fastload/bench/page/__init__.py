"""report.html: the JSON of a benchmark as one page that opens offline.

render.py  the page: its head, its warnings, its sections in order, where the figures come from
panels.py  a section for each picture, with the words around it
charts.py  the pictures, as SVG
tables.py  the tables: medians by row, and every run
markup.py  HTML and SVG out of Python values, escaped
page.css   its style
"""
