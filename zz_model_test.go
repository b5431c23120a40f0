package copilot

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// A modelServer plays a model behind an OpenAI-compatible endpoint, so that a real CLI runs whole turns without login or
// network. The prompt says what the model does, on a line of its own among those that the CLI puts around it:
//
//	say: TEXT                    answer TEXT, streamed word by word
//	call: NAME {ARGS}            call a tool; answer "tool said: RESULT" when its result is back
//	calls: NAME {..} ; NAME {..} call several at once; their results are joined by " | "
//	hold: TEXT                   stream the first word, report on Held, wait for Release, stream the rest
//	cut: TEXT                    stream the first word, then break the connection
//	status: CODE                 refuse with that HTTP status
//	history                      list the earlier prompts' scripts, joined by " | "
//
// Anything else is answered "no script".
type modelServer struct {
	http.Handler

	URL  string        // the provider's baseUrl is URL + "/v1"
	Held chan struct{} // receives one value for each answer that is held

	release chan struct{} // receives one value for each Release; closed when the test ends

	mu       sync.Mutex
	requests []modelRequest
}

// A modelRequest is one completion that the CLI asked for.
type modelRequest struct {
	Header   http.Header `json:"-"`
	Body     []byte      `json:"-"`
	Stream   bool
	Messages []modelMessage
}

// A modelMessage is one message of a modelRequest's conversation, its parts joined by newlines.
type modelMessage struct {
	Role, Text string
}

func (m *modelMessage) UnmarshalJSON(data []byte) error {
	var wire struct {
		Role    string
		Content any // a string, a list of parts, or null beside tool calls
	}
	if err := json.Unmarshal(data, &wire); err != nil {
		return err
	}
	m.Role = wire.Role
	switch content := wire.Content.(type) {
	case string:
		m.Text = content
	case []any:
		for _, part := range content {
			p, _ := part.(map[string]any)
			text, _ := p["text"].(string)
			m.Text += text + "\n"
		}
	}
	return nil
}

// newModel returns a modelServer that listens nowhere: only its Handler works.
func newModel() *modelServer {
	m := &modelServer{Held: make(chan struct{}, 64), release: make(chan struct{}, 64)} // room enough never to block
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"fake-model","object":"model"}]}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", m.serveCompletion)
	m.Handler = mux
	return m
}

// newModelServer starts a modelServer and ends it with the test.
func newModelServer(t *testing.T) *modelServer {
	t.Helper()
	m := newModel()
	srv := httptest.NewServer(m)
	m.URL = srv.URL
	t.Cleanup(func() {
		close(m.release) // before Close, which waits for the handlers
		srv.Close()
	})
	return m
}

// Provider returns the provider member of session.create and session.resume; the model's name does not matter.
func (m *modelServer) Provider() map[string]any {
	return map[string]any{"type": "openai", "wireApi": "completions", "baseUrl": m.URL + "/v1", "apiKey": "dummy"}
}

// Release lets one held answer go on. Called early, it counts for the next one.
func (m *modelServer) Release() { m.release <- struct{}{} }

// Requests returns the completions asked for so far, oldest first and with the CLI's retries.
func (m *modelServer) Requests() []modelRequest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.requests)
}

func (m *modelServer) serveCompletion(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	req := modelRequest{Header: r.Header, Body: body}
	if err := errors.Join(err, json.Unmarshal(body, &req)); err != nil {
		refuseCompletion(w, http.StatusBadRequest, err.Error())
		return
	}
	m.mu.Lock()
	m.requests = append(m.requests, req)
	n := len(m.requests)
	m.mu.Unlock()

	earlier, script, results := readConversation(req.Messages)
	verb, text, _ := strings.Cut(script, ":")
	text = strings.TrimSpace(text)
	c := &completion{w: w, stream: req.Stream}
	switch verb {
	case "say":
		c.write(text)
	case "hold", "cut":
		first, rest, _ := strings.Cut(text, " ")
		c.write(first + " ")
		if verb == "cut" {
			panic(http.ErrAbortHandler) // closes the connection
		}
		m.Held <- struct{}{}
		select {
		case <-m.release:
			c.write(rest)
		case <-r.Context().Done(): // the CLI hung up
			return
		}
	case "call", "calls":
		if len(results) > 0 {
			c.write("tool said: " + strings.Join(results, " | "))
			break
		}
		if c.calls, err = parseToolCalls(text, n); err != nil {
			refuseCompletion(w, http.StatusBadRequest, err.Error())
			return
		}
	case "status":
		code, _ := strconv.Atoi(text)
		refuseCompletion(w, max(code, http.StatusBadRequest), "scripted status "+text)
		return
	case "history":
		c.write(strings.Join(earlier, " | "))
	default:
		c.write("no script")
	}
	c.end()
}

// readConversation returns the last user message's script, those of the user messages before it, and the tool results
// that came after it.
func readConversation(messages []modelMessage) (earlier []string, script string, results []string) {
	line := regexp.MustCompile(`(?m)^(say|calls?|hold|cut|status): .*$|^history$`)
	for _, m := range messages {
		switch m.Role {
		case "user":
			if script != "" {
				earlier = append(earlier, script)
			}
			script, results = line.FindString(m.Text), nil
		case "tool":
			results = append(results, strings.TrimSpace(m.Text))
		}
	}
	return earlier, script, results
}

// parseToolCalls reads "NAME {ARGS} ; NAME {ARGS}" into the wire form of tool calls; request makes their ids unique.
func parseToolCalls(s string, request int) ([]map[string]any, error) {
	var calls []map[string]any
	for s != "" {
		name, rest, _ := strings.Cut(s, " ")
		var args json.RawMessage
		dec := json.NewDecoder(strings.NewReader(rest))
		if err := dec.Decode(&args); err != nil {
			return nil, fmt.Errorf("script %q: arguments of %s: %w", s, name, err)
		}
		calls = append(calls, map[string]any{
			"index": len(calls), "id": fmt.Sprintf("call_%d_%d", request, len(calls)), "type": "function",
			"function": map[string]any{"name": name, "arguments": string(args)},
		})
		s = strings.TrimLeft(rest[dec.InputOffset():], " ;")
	}
	return calls, nil
}

// A completion is one answer of the model: streamed, its words go out at once, else all together at the end.
type completion struct {
	w      http.ResponseWriter
	stream bool
	text   string
	calls  []map[string]any
}

func (c *completion) write(text string) {
	c.text += text
	if !c.stream {
		return
	}
	for _, word := range strings.SplitAfter(text, " ") {
		c.chunk(map[string]any{"role": "assistant", "content": word}, nil)
	}
}

func (c *completion) end() {
	message, reason := map[string]any{"role": "assistant"}, "stop"
	if c.calls != nil {
		message["tool_calls"], reason = c.calls, "tool_calls"
	}
	if c.stream {
		c.chunk(message, reason)
		io.WriteString(c.w, "data: [DONE]\n\n")
		return
	}
	message["content"] = c.text
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Write(completionBody("chat.completion", map[string]any{"message": message, "finish_reason": reason}))
}

// chunk streams one delta; reason is nil in all but the last.
func (c *completion) chunk(delta map[string]any, reason any) {
	c.w.Header().Set("Content-Type", "text/event-stream")
	choice := map[string]any{"delta": delta, "finish_reason": reason}
	fmt.Fprintf(c.w, "data: %s\n\n", completionBody("chat.completion.chunk", choice))
	c.w.(http.Flusher).Flush()
}

func completionBody(object string, choice map[string]any) []byte {
	choice["index"] = 0
	body, _ := json.Marshal(map[string]any{
		"id": "chatcmpl-1", "object": object, "created": 1, "model": "fake-model", "choices": []any{choice},
		"usage": map[string]any{"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
	})
	return body
}

func refuseCompletion(w http.ResponseWriter, code int, why string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": why}})
}
