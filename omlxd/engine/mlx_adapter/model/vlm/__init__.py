"""Models of mlx-vlm: images, and text of families that mlx-lm lacks."""
