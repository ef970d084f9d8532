"""Controls: FP8 broken on purpose, to show what the checks catch. Each is a row of one of these modules' tables.

``fault(id, title, code, way, ...)`` states one: what is broken, what must be said of it, and how an arm is broken. The
ways are classes on top of an arm's engine (:mod:`controls.ways`). A control whose breakage takes several methods is a
class under ``@control(id, title, code, ...)``. :mod:`controls.catalogue` holds them all.
"""
