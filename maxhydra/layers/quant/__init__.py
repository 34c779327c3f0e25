"""Quantized weights: storage formats, rules, quantization-aware training and amax history."""
