"""HTML pages of reports and plans: each is one file that needs no network and no script. `html`
renders the `templates`, `charts` computes what they draw.

Imports `base` and `recipe`.
"""
