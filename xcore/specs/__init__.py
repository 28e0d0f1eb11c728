"""What is planned and with what: models, clusters, engines, workloads, profiles, schedules, estimates."""
