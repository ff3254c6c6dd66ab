"""Experiments: what needs more than reading a forward pass along, such as interventions or fits."""
