"""Import and export of weights: Hugging Face, PEFT, GGUF and maxhydra checkpoints.

load.py loads weights from any supported format. hf_config.py and tables/ do not import jax.
"""
