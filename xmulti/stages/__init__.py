"""Applications of several models in stages (SamuLLM): what calls cost, and how long they take on replicas."""
