"""Google's Gemini API, as Gemini CLI and Google's `genai` SDKs speak it."""
