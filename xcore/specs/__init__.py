"""Specs and results: models, clusters, engines, workloads, profiles, schedules, estimates."""
