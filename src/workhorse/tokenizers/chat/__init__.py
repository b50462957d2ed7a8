"""Chats as text and token ids, by templates from other people."""
