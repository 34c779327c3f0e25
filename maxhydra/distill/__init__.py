"""Knowledge distillation: divergence and feature losses, and initialization of a student from teacher layers."""
