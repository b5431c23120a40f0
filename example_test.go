package copilot_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/textproto"
	"os"
	"strconv"
	"time"

	"copilot"
)

// server plays the Copilot CLI for the examples: it answers each prompt word by word. Where the session has a tool or can be asked for
// permission, it does that first.
type server struct {
	conn net.Conn
	sent int
	host params // of session.create
}

// params are those members of all requests that the server looks at.
type params struct {
	SessionID         string
	Prompt            string
	Tools             []struct{ Name string }
	RequestPermission bool
	Result            json.RawMessage // of an answer to what the server has asked
}

// connect returns a client of a fresh server. A program that has the CLI calls copilot.Start instead.
func connect(ctx context.Context) *copilot.Client {
	near, far := net.Pipe()
	go (&server{conn: far}).run()
	client, err := copilot.NewClient(ctx, near, nil)
	if err != nil {
		log.Fatal(err)
	}
	return client
}

func (s *server) run() {
	defer s.conn.Close()
	r := textproto.NewReader(bufio.NewReader(s.conn))
	for {
		header, err := r.ReadMIMEHeader()
		if err != nil {
			return
		}
		length, _ := strconv.Atoi(header.Get("Content-Length"))
		body := make([]byte, length)
		if _, err := io.ReadFull(r.R, body); err != nil {
			return
		}
		var m struct {
			ID     json.RawMessage
			Method string
			Params params
		}
		if json.Unmarshal(body, &m) == nil && m.Method != "" {
			s.answer(m.ID, m.Method, m.Params)
		}
	}
}

func (s *server) answer(id json.RawMessage, method string, p params) {
	result := map[string]any{"sessionId": p.SessionID}
	switch method {
	case "connect":
		result = map[string]any{"ok": true, "protocolVersion": 3, "version": "1.0.102"}
	case "sessions.watch":
		result["readOnly"] = true
		result["metadata"] = map[string]any{"name": "fix the build"}
	case "session.send":
		s.sent++
		result["messageId"] = s.message()
	}
	s.write(map[string]any{"jsonrpc": "2.0", "id": id, "result": result})
	switch method {
	case "session.create":
		s.host = p
		s.event(p.SessionID, "session.start", map[string]any{"sessionId": p.SessionID, "copilotVersion": "1.0.102"})
	case "session.send":
		switch {
		case len(s.host.Tools) > 0:
			s.event(p.SessionID, "external_tool.requested", map[string]any{
				"requestId": "r", "toolCallId": "c", "toolName": s.host.Tools[0].Name, "arguments": map[string]any{"city": "Paris"}})
		case s.host.RequestPermission:
			s.event(p.SessionID, "permission.requested", map[string]any{
				"requestId": "r", "permissionRequest": map[string]any{"kind": "shell", "fullCommandText": "rm -r /", "intention": "clean up"}})
		default:
			s.turn(p.SessionID, s.message(), "You said: "+p.Prompt)
		}
	case "session.tools.handlePendingToolCall", "session.permissions.handlePendingPermissionRequest":
		s.turn(p.SessionID, s.message(), "The host said: "+string(p.Result))
	case "sessions.watch":
		s.turn(p.SessionID, "theirs", "The build is fixed.")
		s.write(map[string]any{"jsonrpc": "2.0", "method": "session.lifecycle",
			"params": map[string]any{"type": "session.disconnected", "sessionId": p.SessionID}})
	}
}

func (s *server) message() string { return "message-" + strconv.Itoa(s.sent) }

func (s *server) turn(session, message, text string) {
	s.event(session, "user.message", map[string]any{"messageId": message})
	for _, word := range bytes.SplitAfter([]byte(text), []byte(" ")) {
		s.event(session, "assistant.message_delta", map[string]any{"deltaContent": string(word)})
	}
	s.event(session, "assistant.message", map[string]any{"content": text})
	s.event(session, "session.idle", map[string]any{})
}

func (s *server) event(session, typ string, data any) {
	event := map[string]any{"id": "e", "type": typ, "timestamp": "2026-01-02T03:04:05Z", "data": data}
	s.write(map[string]any{"jsonrpc": "2.0", "method": "session.event", "params": map[string]any{"sessionId": session, "event": event}})
}

func (s *server) write(m any) {
	body, err := json.Marshal(m)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Fprintf(s.conn, "Content-Length: %d\r\n\r\n%s", len(body), body)
}

// The shortest program: start the CLI that is found, open a session, ask, and leave nothing behind.
func Example() {
	ctx := context.Background()
	client, err := copilot.Start(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Stop(ctx)

	session, err := client.CreateSession(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "What is in this directory?"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Content)
}

// Ask sends a message and ranges over its turn.
func ExampleSession_Ask() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{Streaming: true})
	if err != nil {
		log.Fatal(err)
	}

	for event, err := range session.Ask(ctx, copilot.Message{Prompt: "good morning"}) {
		if err != nil {
			log.Fatal(err)
		}
		switch p := event.Payload().(type) {
		case *copilot.AssistantMessageDelta:
			fmt.Print(p.DeltaContent)
		case *copilot.SessionIdle:
			fmt.Println()
		}
	}
	// Output: You said: good morning
}

// A prepared session has its subscribers before its first event.
func ExampleClient_PrepareSession() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)

	prepared, err := client.PrepareSession(nil)
	if err != nil {
		log.Fatal(err)
	}
	events := prepared.Subscribe()
	defer events.Close()
	if _, err := prepared.Start(ctx); err != nil {
		log.Fatal(err)
	}
	first, err := events.Next(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(first.Type)
	// Output: session.start
}

// A subscriber that is too slow for its ring is told how much it has missed, and goes on.
func ExampleLagError() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{EventBuffer: 2})
	if err != nil {
		log.Fatal(err)
	}
	events := session.Subscribe()
	defer events.Close()
	if _, err := session.SendAndWait(ctx, copilot.Message{Prompt: "one two three four"}); err != nil {
		log.Fatal(err)
	}

	for event, err := range events.All(ctx) {
		var lag *copilot.LagError
		switch {
		case errors.As(err, &lag):
			fmt.Println("missed some")
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Println(event.Type)
		}
		if event.Type == copilot.EventSessionIdle {
			break
		}
	}
	// Output:
	// missed some
	// assistant.message
	// session.idle
}

// A watch looks at a session that somebody else runs, from its beginning to its end.
func ExampleClient_WatchSharedSession() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)

	watch, err := client.WatchSharedSession(ctx, "their-session", nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("watching:", watch.Metadata().Name)
	for event, err := range watch.Events(ctx) {
		if errors.Is(err, copilot.ErrDisconnected) {
			fmt.Println("it has ended")
			break
		} else if err != nil {
			log.Fatal(err)
		}
		if m, ok := event.Payload().(*copilot.AssistantMessage); ok {
			fmt.Println(m.Content)
		}
	}
	// Output:
	// watching: fix the build
	// The build is fixed.
	// it has ended
}

// A host that must not be kept waiting stops in order as long as it can, and by force after that.
func ExampleClient_Stop() {
	client := connect(context.Background())

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := client.Stop(ctx); err != nil {
		state, err := client.ForceStopAndWait(context.Background())
		fmt.Fprintln(os.Stderr, "killed:", state, err)
	}
	<-client.Done()
	fmt.Println(errors.Is(client.Err(), copilot.ErrClosed))
	// Output: true
}

// Call reaches what has no method of its own.
func ExampleSession_Call() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{SessionID: "mine"})
	if err != nil {
		log.Fatal(err)
	}

	var result struct {
		SessionID string `json:"sessionId"`
	}
	if err := session.Call(ctx, "session.metadata.snapshot", nil, &result); err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.SessionID)
	// Output: mine
}

// A tool is a Go function; the schema of its arguments comes from their type.
func ExampleNewTool() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)

	type place struct {
		City string `json:"city" description:"name of the city"`
	}
	weather := copilot.NewTool("weather", "Tells the weather.", func(ctx context.Context, p place) (string, error) {
		return "rain in " + p.City, nil
	})
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{Tools: []copilot.Tool{weather}})
	if err != nil {
		log.Fatal(err)
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Do I need an umbrella?"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Content)
	// Output: The host said: "rain in Paris"
}

// A policy decides what the agent may do. A refusal with feedback lets the agent go on another way.
func ExamplePermissionHandler() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)

	policy := func(ctx context.Context, r copilot.PermissionRequest) (copilot.PermissionDecision, error) {
		if r.Kind == copilot.PermissionRead {
			return copilot.ApproveOnce(), nil
		}
		return copilot.Reject("only reading is allowed here"), nil
	}
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{OnPermission: policy})
	if err != nil {
		log.Fatal(err)
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Clean up, please."})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Content)
	// Output: The host said: {"feedback":"only reading is allowed here","kind":"reject"}
}

// Resume continues a stored session, also after a crash: what was pending can still be answered.
func ExampleClient_ResumeSession() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)

	session, err := client.ResumeSession(ctx, "stored-session", &copilot.SessionConfig{ContinuePendingWork: true})
	if errors.Is(err, copilot.ErrSessionNotFound) || errors.Is(err, copilot.ErrCannotResume) {
		session, err = client.CreateSession(ctx, nil) // start afresh
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(session.ID())
	// Output: stored-session
}

// A subscription to the lives of all sessions, taken before the first one begins, misses none.
func ExampleClient_SubscribeLifecycle() {
	ctx := context.Background()
	client := connect(ctx)
	defer client.Stop(ctx)

	notices := client.SubscribeLifecycle()
	defer notices.Close()
	if _, err := client.WatchSharedSession(ctx, "their-session", nil); err != nil {
		log.Fatal(err)
	}
	notice, err := notices.Next(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(notice.Type, notice.SessionID)
	// Output: session.disconnected their-session
}
