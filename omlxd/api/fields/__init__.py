"""Fields of requests as every protocol reads them: bounds, leniency, names that nobody knows."""
