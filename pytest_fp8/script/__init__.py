"""A gate on the user's own script: two runs of it are held at their steps and asked as arms are.

``command`` has the mark's words, ``process`` starts the script and asks it, ``pair`` asks both runs, ``judge`` judges.
What runs inside the script is ``pytest_fp8/watch/held.py``.
"""
