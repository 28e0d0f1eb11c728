"""What one iteration costs on a stage, by what the stage holds and its tensor-parallel degree (docs/theory.md)."""
