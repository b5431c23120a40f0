package copilot

import (
	"errors"
	"os"
	"testing"
)

// startReal starts the real CLI with a home of its own, opts.BaseDir or a new one, and skips the test where there is none.
func startReal(t *testing.T, opts Options) *Client {
	t.Helper()
	cli := os.Getenv("COPILOT_CLI_PATH")
	if cli == "" {
		t.Skip("skipped: COPILOT_CLI_PATH names no CLI to test against")
	}
	home := opts.BaseDir
	if home == "" {
		home = t.TempDir()
	}
	opts.CLI = cli
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		cache = home
	}
	opts.Env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME="+cache)
	opts.BaseDir = home
	opts.UseLoggedInUser = new(bool)
	c, err := Start(testContext(t), &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(testContext(t)); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return c
}

func TestRealTurn(t *testing.T) {
	for _, transport := range []Transport{Stdio, TCP} {
		c := startReal(t, Options{Transport: transport})
		model := newModelServer(t)
		for _, streaming := range []bool{true, false} {
			s := createSession(t, c, &SessionConfig{Model: "fake-model", Streaming: streaming, Provider: &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: model.URL + "/v1", APIKey: "dummy"}, WorkingDirectory: t.TempDir()})
			m, err := s.SendAndWait(testContext(t), Message{Prompt: "say: hello world"})
			if err != nil {
				t.Fatal(err)
			}
			if m.Content != "hello world" {
				t.Errorf("got %q", m.Content)
			}
			deltas := 0
			for e, err := range s.Ask(testContext(t), Message{Prompt: "say: a b c"}) {
				if err != nil {
					t.Fatal(err)
				}
				if e.Type == EventAssistantMessageDelta {
					deltas++
				}
			}
			if (deltas > 0) != streaming {
				t.Errorf("%d deltas with streaming %v", deltas, streaming)
			}
			events, err := s.History(testContext(t))
			if err != nil || len(events) < 5 {
				t.Errorf("history: %d %v", len(events), err)
			}
			id := s.ID()
			if err := s.Disconnect(testContext(t)); err != nil {
				t.Error(err)
			}
			s, err = c.ResumeSession(testContext(t), id, &SessionConfig{Model: "fake-model", Provider: &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: model.URL + "/v1", APIKey: "dummy"}})
			if err != nil {
				t.Fatal(err)
			}
			if m, err := s.SendAndWait(testContext(t), Message{Prompt: "history"}); err != nil {
				t.Error(err)
			} else {
				t.Log(m.Content)
			}
		}
		t.Logf("%+v", c.Timings())
	}
}

// A CLI without login accepts a session, and reports the missing login with the first turn.
func TestRealNotLoggedIn(t *testing.T) {
	c := startReal(t, Options{})
	s := createSession(t, c, &SessionConfig{WorkingDirectory: t.TempDir()})
	if _, err := s.SendAndWait(testContext(t), Message{Prompt: "hello"}); !errors.Is(err, ErrAuthentication) {
		t.Errorf("got %v, want ErrAuthentication", err)
	}
}
