"""Video files with an audio track, from which frames and samples are read back exactly."""

import io
from fractions import Fraction

import numpy as np

from tests.support.skips import import_optional


def matroska(frames: np.ndarray, fps: float, samples: np.ndarray | None = None, rate: int = 16000) -> bytes:
    """Frames [count, height, width, 3] of bytes as FFV1, and int16 samples [channels, count] as PCM."""
    av, buffer = import_optional("av", extra="video"), io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        pictures = file.add_stream("ffv1", rate=Fraction(fps))
        pictures.height, pictures.width, pictures.pix_fmt = *frames.shape[1:3], "bgr0"
        sound = None if samples is None else file.add_stream("pcm_s16le", rate=rate)
        if sound is not None:
            sound.layout = "mono" if len(samples) == 1 else "stereo"
        for frame in frames:
            file.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(pictures.encode())
        if sound is not None:
            packed = np.ascontiguousarray(samples.T).reshape(1, -1)
            block = av.AudioFrame.from_ndarray(packed, format="s16", layout=sound.layout.name)
            block.sample_rate = rate
            file.mux(sound.encode(block))
            file.mux(sound.encode())
    return buffer.getvalue()
