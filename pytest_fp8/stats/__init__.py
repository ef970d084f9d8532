"""Statistics behind the verdicts: quantiles, variance components, one estimator, one sequence of looks. Pure."""
