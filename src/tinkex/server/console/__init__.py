"""The console: pages at `/console` that show training while it happens.

Server-made HTML that can be read without JavaScript, a little JavaScript of our own for what moves,
and JSON behind every page. No file comes from another host.
"""
