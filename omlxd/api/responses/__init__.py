"""OpenAI's Responses API. Rule: responses/ may use api/openai/, never the other way round."""
