"""Plans of several models: found, compared, run and served."""
