"""Controls: FP8 broken on purpose, each in a way that has happened to somebody, to show what the checks catch.

One class per control states all of it: its number and name, where it happened, what must find it, and the breakage. A
new control is a new class in one of these modules; :mod:`controls.catalogue` finds it.
"""
