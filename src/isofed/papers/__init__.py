"""The papers' tables and figures as presets, the published numbers, and what comes of running them again.

- ``published.csv``: what the papers print, one row a number
- ``feduv/table1.yaml`` and so on: what to run for each table and figure, shared parts in ``base.yaml``
- :mod:`isofed.papers.presets` reads these, :mod:`isofed.papers.runner` runs what is missing within a time budget
- :mod:`isofed.papers.results`: one small JSON file for each finished cell and seed
- :mod:`isofed.papers.compare` sets paper and measured side by side; the command and the pages show the same
"""
