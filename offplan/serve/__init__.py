"""The room of the server: OpenAI's API over HTTP, in front of one session."""
