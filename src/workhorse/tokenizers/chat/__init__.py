"""Renders chats to text and token ids with the chat templates of models."""
