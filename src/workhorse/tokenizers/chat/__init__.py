"""Chats as text and token ids, by templates that somebody else wrote."""
