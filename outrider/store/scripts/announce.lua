-- KEYS: index (worker id by expiry), descriptions (worker id to JSON). ARGV: worker id, JSON, TTL ms.
local now = now_ms()
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', integer(now), 'LIMIT', 0, 1000)
if #expired > 0 then
  redis.call('ZREM', KEYS[1], unpack(expired))
  redis.call('HDEL', KEYS[2], unpack(expired))
end
redis.call('ZADD', KEYS[1], integer(now + tonumber(ARGV[3])), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
-- The keys live as long as the longest-lived entry.
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
redis.call('PEXPIREAT', KEYS[1], integer(tonumber(last[2])))
redis.call('PEXPIREAT', KEYS[2], integer(tonumber(last[2])))
return {'OK'}
