"""A report as one HTML file with pictures, for people. Needs the extra ``report``: jinja2 and matplotlib."""
