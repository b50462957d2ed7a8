"""Chats rendered to text and token ids, by templates that come with downloaded models."""
