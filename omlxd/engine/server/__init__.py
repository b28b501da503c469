"""The engine of one model: answers the front's frames, loads the model, tells what it does and why."""
