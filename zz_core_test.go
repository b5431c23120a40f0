package copilot

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

func TestTurn(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	turn := func(id, text string) {
		p.send(
			p.event(s.ID(), "user.message", map[string]any{"content": "x", "messageId": id}),
			p.event(s.ID(), "assistant.message_delta", map[string]any{"messageId": "a", "deltaContent": text}),
			p.event(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": text}),
			p.event(s.ID(), "session.idle", map[string]any{}))
	}
	result := async(func() error {
		m, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"})
		if err == nil && m.Content != "one" {
			err = fmt.Errorf("got %q", m.Content)
		}
		return err
	})
	p.wait("session.send", 1)
	turn("m1", "one")
	if err := await(t, "turn", result); err != nil {
		t.Fatal(err)
	}
	result = async(func() error {
		n := 0
		for e, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
			if err != nil {
				return err
			}
			_ = e
			n++
		}
		if n != 4 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	p.wait("session.send", 2)
	turn("m2", "two")
	if err := await(t, "ask", result); err != nil {
		t.Fatal(err)
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Send(testContext(t), Message{}); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := c.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestAgentErrorIsAuthentication(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  AgentError
		want bool
	}{
		{"refused key", AgentError{Type: "authentication", StatusCode: 401}, true},
		{"refused key, other type", AgentError{Type: "query", StatusCode: 401}, true},
		{"no login", AgentError{Type: "query", Message: "Execution failed: InvalidArg, No GitHub OAuth token or Copilot HMAC key provided"}, true},
		{"other query", AgentError{Type: "query", Message: "Failed to get response from the AI model"}, false},
		{"quota", AgentError{Type: "quota", StatusCode: 429}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := errors.Is(&tt.err, ErrAuthentication); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}
