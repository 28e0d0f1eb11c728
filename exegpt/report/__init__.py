"""Reports: predictions and measurements, for terminals and as one HTML page."""
