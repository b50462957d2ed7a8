"""An HTTP server with OpenAI's API for one model: `workhorse serve`."""
