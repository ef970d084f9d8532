"""Controls: FP8 broken on purpose, to show what the checks catch. Each is a row of one of these modules' tables.

``control(id, code, title)(...)`` states one: what must be said of it, and how an arm is broken. The ways are classes on
top of an arm's engine (:mod:`controls.ways`). :mod:`controls.catalogue` holds them all.
"""
