"""The cost of one iteration on a stage, by the stage's layers and its tensor-parallel degree (docs/theory.md)."""
