"""Capture: from a model's forward pass to the tensors its attention consumed, and the proof that they are those."""
