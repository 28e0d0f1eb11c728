"""Several models on one cluster: budgets, and which devices they are (docs/multimodel.md)."""
