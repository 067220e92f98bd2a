"""Tuned tile configurations, one YAML file per GPU model."""
