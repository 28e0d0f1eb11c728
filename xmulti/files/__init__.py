"""Files of several models: plans by stage, calls between models, applications."""
