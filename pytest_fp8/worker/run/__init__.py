"""An arm's model as it trains: built, converted, compiled, and followed along a curve."""
