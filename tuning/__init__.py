"""The tuner and its winners."""
