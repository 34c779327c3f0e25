"""Knowledge distillation: divergences from a teacher's distributions, feature losses, initialization from its layers."""
