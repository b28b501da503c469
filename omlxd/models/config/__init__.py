"""What the JSON files of a model folder say."""
