"""Is FP8 really running? What was converted, which recipe was in force, which products ran."""
