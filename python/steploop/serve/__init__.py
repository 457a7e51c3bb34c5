"""`steploop serve`: an OpenAI-compatible HTTP server over AsyncLLMEngine."""
