"""Images and videos: reading, and the preprocessing of model families."""

from maxhydra.data.images.patches import merged_coordinates, merged_patches
from maxhydra.data.images.processor import ProcessedImage, Processor, make_processor, settings_processor
from maxhydra.data.images.read import Video, read_image, read_video
from maxhydra.data.images.video import ProcessedVideo, VideoProcessor, make_video_processor
from maxhydra.data.images.video_files import read_any_video, read_audio_track

__all__ = [
    "ProcessedImage",
    "ProcessedVideo",
    "Processor",
    "Video",
    "VideoProcessor",
    "make_processor",
    "make_video_processor",
    "merged_coordinates",
    "merged_patches",
    "read_any_video",
    "read_audio_track",
    "read_image",
    "read_video",
    "settings_processor",
]
