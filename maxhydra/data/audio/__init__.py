"""Audio: reading, log-mel features of model families, and generated tones with questions."""

from maxhydra.data.audio.features import AudioFeatures, FeatureExtractor, make_extractor
from maxhydra.data.audio.read import read_audio

__all__ = ["AudioFeatures", "FeatureExtractor", "make_extractor", "read_audio"]
